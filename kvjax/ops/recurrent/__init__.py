"""Linear attentions and other memories of constant size: one general recurrence, and others beside it."""
