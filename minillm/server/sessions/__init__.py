"""Chat apps on other machines: the routes of their sessions, and the program that connects an app to a server."""
