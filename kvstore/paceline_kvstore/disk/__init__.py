"""What the disk tier is made of: the record format, segment files, the index in memory, the scan that rebuilds it."""
