"""From logits to tokens: rules, cuts, draws, verification of guesses, logprobs. On the host, over rows of float32."""
