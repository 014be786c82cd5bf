"""The parts of the S3 tier: settings, names, packs, requests, reads, writes. `tiers.s3` puts them together."""
