"""Several tiers as one store: what goes to which, what comes from where, and none of it in the caller's time."""
