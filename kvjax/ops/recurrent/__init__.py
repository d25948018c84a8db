"""Linear attentions and other memories of constant size: the one recurrence, and those beside it."""
