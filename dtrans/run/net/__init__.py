"""Messages over ZeroMQ.

wire      a msgpack header and raw frames
buffers   memory that is received into, and kept
inbox     blocks as they come into such memory
sockets   sockets as this package makes them
"""
