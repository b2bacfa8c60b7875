"""Messages over ZeroMQ.

wire      a msgpack header and raw frames
buffers   memory that is received into, and kept
inbox     blocks that arrive in such memory
sockets   sockets as this package makes them
"""
