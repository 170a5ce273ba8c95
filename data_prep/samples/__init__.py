"""Training samples: token ids and loss masks, and a page to inspect them."""
