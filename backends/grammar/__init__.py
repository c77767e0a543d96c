"""What an answer must look like: JSON by schema, patterns, choices, grammars, as masks of tokens. Free of torch."""
