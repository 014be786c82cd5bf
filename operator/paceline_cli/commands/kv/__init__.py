"""`paceline kv`: look at, check, tidy and measure a place where KV is stored: a disk tier's folder or an S3 prefix."""
