"""Keep: which slots of the cache stay. Scores rank slots, budgets say how many, patterns protect some."""
