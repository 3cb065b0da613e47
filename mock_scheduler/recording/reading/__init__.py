"""Reading a recording: finding steps, opening them, and checking that they answer a request."""
