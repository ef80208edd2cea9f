"""Look at memorisation while it happens: each is a `Monitor` during training and functions after it."""
