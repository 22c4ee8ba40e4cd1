"""A user's model: made ready, its precision, its loss and what that is worth."""
