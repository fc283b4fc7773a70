"""Dead letters: what nobody could process."""
