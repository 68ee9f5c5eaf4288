"""What tests of several folders share: tiny models, servers, cases and recorded answers."""
