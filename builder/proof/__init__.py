"""The proof that verification is lossless: every random decision of drafting and judging enumerated, exactly."""
