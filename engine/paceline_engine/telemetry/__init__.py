"""What the GPUs of this engine say of themselves, read in the API process when /metrics is asked for. No torch here."""
