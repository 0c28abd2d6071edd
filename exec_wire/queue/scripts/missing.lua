-- Finds entries that are gone.
-- KEYS: streams.
-- ARGV: for each entry: stream number, entry id.
-- Returns the positions of the missing entries, from 0.
local gone = {}
for at = 1, #ARGV, 2 do
  if #redis.call('XRANGE', KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 1]) == 0 then gone[#gone + 1] = (at - 1) / 2 end
end
return gone
