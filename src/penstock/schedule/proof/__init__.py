"""The proof that a schedule is right, before the first step."""
