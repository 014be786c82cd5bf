"""The local runtime: an in-memory object store with API semantics, the controllers a laptop needs, and their glue."""
