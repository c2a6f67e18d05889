"""What each command takes, as plain data; nothing here imports torch."""
