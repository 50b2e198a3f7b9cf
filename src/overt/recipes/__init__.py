"""Small tasks with everything needed to train and read a model on them."""
