"""The operator: observe, plan (pure), execute."""
