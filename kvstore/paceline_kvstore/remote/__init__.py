"""The client's side of the node server's protocol, under `tiers.remote`."""
