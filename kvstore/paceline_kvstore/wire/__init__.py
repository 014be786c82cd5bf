"""How engines and the node server talk: `frames` and `messages` say what the bytes mean, `transport` moves them."""
