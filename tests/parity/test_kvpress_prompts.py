"""Rows of kvpress' data sets become the ids that its own pipeline makes of them."""

import pytest
from kvpress.pipeline import KVPressTextGenerationPipeline
from transformers import PreTrainedTokenizerFast

from kvjax.eval.tasks.suite import make_suite
from tests.eval.published_rows import CHAT, KVPRESS, LONGBENCH, LOOGLE, chatting, write


@pytest.mark.parity
@pytest.mark.parametrize("chat", [CHAT, None])
@pytest.mark.parametrize("row", [KVPRESS, LOOGLE, LONGBENCH, {**KVPRESS, "question": ""}])
@pytest.mark.parametrize("length", [None, 200])
def test_ids_are_those_of_the_pipeline(tmp_path, chat, row, length):
    model = chatting(chat)
    row = {**row, "context": row["context"] * 4}
    ((sample,),) = make_suite(model, [str(write(tmp_path / "rows.jsonl", row))], length=length).rows(
        0, "agnostic"
    )
    pipeline = KVPressTextGenerationPipeline.__new__(KVPressTextGenerationPipeline)
    special = {"bos_token": "<s>", "chat_template": chat}
    pipeline.tokenizer = PreTrainedTokenizerFast(tokenizer_object=model.tokenizer, **special)
    most = 10**9 if length is None else length - len(sample.question)
    made = pipeline.preprocess(row["context"], [row["question"]], row["answer_prefix"], most)
    assert made["context_ids"][0].tolist() == [*sample.context]
    assert made["questions_ids"][0][0].tolist() == [*sample.question]
