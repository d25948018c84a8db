"""Read: which slots of the cache a query attends to."""
