"""Read: which slots of the cache a query attends to; all of them stay in the cache."""
