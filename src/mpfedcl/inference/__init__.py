"""A finished run in use: opened, asked about new images, carried elsewhere."""
