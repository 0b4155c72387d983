"""How each kind of operator may be split, and what its parts need of one another."""
