"""Finds ranks that compute slowly and links that send slowly, and moves layers away from a slow rank."""
