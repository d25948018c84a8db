"""Keep: which slots stay. Scores rank them, a budget says how many, patterns name those that always stay."""
