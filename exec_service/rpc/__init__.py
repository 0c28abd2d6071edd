"""The gRPC endpoints."""
