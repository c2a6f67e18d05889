"""Public data sets: download the originals and prepare them."""
