"""`make gpu-proof`: everything that needs a GPU, in parts that can be run alone and resumed."""
