"""Finds ranks that compute slowly and links that send slowly, and moves work away from a slow rank."""
