"""The objectives of `train.objective` besides predicting the next token: a file each."""
