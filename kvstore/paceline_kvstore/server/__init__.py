"""`paceline-kvstore serve`: a process that shares one tier among the engines of a node."""
