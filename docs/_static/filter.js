// Puts a search field, and a choice for every column of few short values, over the tables of `.filtered` and over long ones.
const LONG = 40;

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) {
    const box = table.closest(".filtered") || table.parentElement;
    if (!table.tHead || (!box.matches(".filtered") && table.tBodies[0].rows.length < LONG)) continue;
    const rows = [...table.tBodies[0].rows];
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    const bar = document.createElement("form");
    bar.className = "filter-bar";
    bar.addEventListener("submit", (event) => event.preventDefault());
    const text = document.createElement("input");
    Object.assign(text, { type: "search", placeholder: "search this table" });
    text.setAttribute("aria-label", "search this table");
    const count = document.createElement("output");
    const choices = heads.map((head, column) => {
      const values = [...new Set(rows.map((row) => row.cells[column].textContent.trim()))];
      if (values.length < 2 || values.length > 24 || values.some((value) => value.length > 30)) return null;
      const choice = document.createElement("select");
      choice.setAttribute("aria-label", head);
      for (const value of ["", ...values.filter(Boolean).sort()]) choice.add(new Option(value || `${head}: all`, value));
      return choice;
    });
    const apply = () => {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const found = row.textContent.toLowerCase();
        const fits =
          words.every((word) => found.includes(word)) &&
          choices.every((choice, i) => !choice || !choice.value || row.cells[i].textContent.trim() === choice.value);
        row.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${rows.length}`;
    };
    bar.append(text, ...choices.filter(Boolean), count);
    bar.addEventListener("input", apply);
    box.before(bar);
    apply();
  }
});
