"""The messages between clients and servers: their form, their authentication, their sockets."""
