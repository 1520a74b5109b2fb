"""What programs that use Tandem import; `tandem.client` is the client."""
