"""Reading a recording: finding steps, opening them, and checking they answer a request."""
