"""One question, from text to grounded answer: retrieve, quote, prompt, answer."""
