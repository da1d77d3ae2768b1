"""The lines at the top and the bottom of the screen."""
