"""Tool calls in a model's text: finding them while the text arrives, and forcing them by a grammar."""
