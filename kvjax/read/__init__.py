"""Read: which slots a query visits."""
