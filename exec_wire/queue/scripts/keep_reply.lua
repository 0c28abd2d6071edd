-- Renews the reply stream of a gateway, or creates it.
-- KEYS: the stream.
-- ARGV: seconds until it expires.
-- Returns 1 if the stream did not exist.
if redis.call('EXPIRE', KEYS[1], ARGV[1]) == 1 then return 0 end
redis.call('XDEL', KEYS[1], redis.call('XADD', KEYS[1], '*', 'a', ''))
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
