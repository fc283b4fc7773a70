"""Reference pages, printed from the models themselves."""
