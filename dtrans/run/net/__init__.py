"""Sockets as this package makes them; what goes by them is `dtrans.protocol.wire`. `net_options` has their options."""
