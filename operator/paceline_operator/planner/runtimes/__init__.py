"""Engine software other than ours: one module each, in the terms of `base`, listed in `registry`. Pure."""
