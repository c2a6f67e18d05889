"""Use of a finished run: predictions, new clients, client contributions and export."""
