"""Sockets as this package makes them; what goes by them is `dtrans.protocol.wire`."""
