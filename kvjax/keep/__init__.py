"""Keep: which slots stay. score -> budget -> select, with patterns that always stay."""
